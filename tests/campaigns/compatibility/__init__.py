"""Every node between loader and sampler, of ComfyUI and of other packs: does it do with our MODEL what it does natively?"""
