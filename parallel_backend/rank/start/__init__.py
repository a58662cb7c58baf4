"""A rank's process before it joins the others: its entry, environment, log, and its end with its parent."""
