"""The ranks' processes: their start, watch and end, and the errors about ranks that fail or hang.

Start: pool.py, local.py (this machine), ray_ranks.py (a Ray cluster). Requests and replies: gathers.py. Hangs: watchdog.py
judges heartbeats, watchdog_thread.py ends ranks that hang. Failures: failure_report.py finds the root cause, failure_text.py
has the text, rank_log.py the log. A rank's process runs rank/start/entry.py, which is imported by name.
"""
