"""Reports of a sampling run: text and Chrome trace."""
