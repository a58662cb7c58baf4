"""Creates a MODEL from a file: its layout, the source of its weights, its class and unused tensors. Proofs of how ranks can
split ComfyUI's own class are stored and shipped here."""
