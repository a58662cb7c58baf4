"""Code that several families share: key maps, conditioning, kinds of blocks."""
