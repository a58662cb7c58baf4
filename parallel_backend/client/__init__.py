"""ComfyUI's side: a model that lives on ranks and answers `predict`."""
