from tests.comfyui.conftest import comfyui  # noqa: F401 (a fixture)
