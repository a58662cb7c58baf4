"""A custom node pack for tests only, without a node: a server that runs ComfyUI's own templates on tiny files.

`POST /stand_ins` with {"files", "loras"}, as inside/templates.py has them, makes it a server for one template, until the
next one. Sizes are cut down as nodes are run, and what is not in a list of files is no error: stand-ins need none.
"""

import asyncio
import contextlib
import sys
from pathlib import Path
from unittest import mock

import execution
import folder_paths
from aiohttp import web
from server import PromptServer

import nodes

NODE_CLASS_MAPPINGS = {}
HERE = Path(__file__).resolve()
INSIDE = HERE.parents[1] / "inside", HERE.parents[3] / "testing" / "comfyui" / "inside"
get_output_data = execution.get_output_data

sys.path.extend(map(str, INSIDE))
with mock.patch.object(sys, "argv", ["server", str(Path(nodes.__file__).parent), folder_paths.base_path]):
    import boot  # noqa: F401 (it looks at the arguments as a script of that folder gets them)
import templates  # noqa: E402

present = contextlib.ExitStack()


@PromptServer.instance.routes.post("/stand_ins")
async def install(request: web.Request) -> web.Response:
    body = await request.json()
    present.close()
    await asyncio.to_thread(lambda: present.enter_context(templates.prepared(body["files"], body["loras"])))
    return web.json_response({})


async def smaller(prompt_id, unique_id, obj, input_data_all, *arguments, **named):
    kind = next((name for name, known in nodes.NODE_CLASS_MAPPINGS.items() if known is type(obj)), "")
    templates.make_small(kind, input_data_all)
    return await get_output_data(prompt_id, unique_id, obj, input_data_all, *arguments, **named)


async def valid(_prompt_id, _prompt, item, *_more, **_named):
    return True, [], item


execution.get_output_data = smaller
execution.validate_inputs = valid
