"""Profiles: a workload driven through a bundle or a server, measured, explained, and written down.

In the order of the data: workload.py (what is asked), points.py (which settings take turns), measure.py (timelines) and
device.py (a GPU's clock), session.py (the turns), metrics.py (figures), costs.py and advice.py (what a round costs, and
which length pays), roofline.py on probes.py, prices.py, record.py (the one schema); words.py, table.py, charts.py,
report.py and export.py (how it is shown), diff.py (two of them). run.py makes a bundle's profile, remote/ a server's.
"""
