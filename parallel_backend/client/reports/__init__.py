"""What a run did: in words, as figures, as a picture."""
