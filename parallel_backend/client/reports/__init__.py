"""Reports of a sampling run: text, Chrome trace, picture."""
