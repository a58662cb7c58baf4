"""Code for single classes that need more than a trial can find out: their blocks in a form that ranks can cut."""
