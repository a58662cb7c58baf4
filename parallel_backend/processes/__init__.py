"""The ranks' processes: started, watched, ended; what is said when one fails or hangs."""
