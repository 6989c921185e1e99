"""Profiles: a workload driven through a bundle or a server, measured, explained, and written down.

In the order of the data: workload.py (what is asked), points.py (which settings take turns), measure.py (timelines),
metrics.py (figures), costs.py and advice.py (what a round costs, which length pays), roofline.py, record.py (the one
schema), table.py, report.py and export.py (how it is shown), diff.py (two of them). run.py puts them together.
"""
