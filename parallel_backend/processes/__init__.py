"""The ranks' processes: started, watched, ended; what is said when one fails or hangs.

Where to look. Start: pool.py, local.py (this machine) or ray_ranks.py (a Ray cluster). What they run, named as a string:
rank/start/entry.py. Requests and replies:
gathers.py. A hang: watchdog.py judges by the ranks' heartbeats, watchdog_thread.py ends ranks that hang. A failure:
failure_report.py finds the root cause, failure_text.py has the words, rank_log.py the rank's own log.
"""
