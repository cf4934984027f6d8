"""Reports: run folders, the groups they form, the table of their scores, and a page with their curves."""

from rl_training.reports.groups import Group, group_runs
from rl_training.reports.runs import Curve, Run, load_run, load_runs
from rl_training.reports.table import Row, table, text_table

__all__ = ["Curve", "Group", "Row", "Run", "group_runs", "load_run", "load_runs", "table", "text_table"]
