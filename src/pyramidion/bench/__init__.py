"""Measure: one stopwatch, one report, and a file for each thing that is measured.

`measure` holds the clock, the memory gauge and the description of the machine; `report` writes JSON, Markdown and
figures; `topk` compares the operator with its rivals. Nothing heavy is imported until one of them is.
"""
