from tests.comfyui.conftest import base, bundled_workflows_models, comfyui, session_server  # noqa: F401 (fixtures)
