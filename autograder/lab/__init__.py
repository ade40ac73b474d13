"""Instruments: run ranks, record what they did, draw it and price it.

Reading order: `ranks` (start here: `run`), `agent` and `rank` (the processes behind it), `travel` (how a function gets
there), `ledger` (what a rank did), `diagnosis` (why a run failed, in words), `timeline`, `memory`, `costs`, and `magic`
for notebooks. `gpt` and `data` are what all modules train.
"""
