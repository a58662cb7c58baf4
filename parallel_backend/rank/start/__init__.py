"""A rank's process before it joins the others: entry, environment, log, and the thread that ends it with its parent."""
