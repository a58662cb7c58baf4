"""What a trial cannot find out of single classes: their blocks in a form that ranks can cut."""
