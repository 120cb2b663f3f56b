"""`studio`: one local page over the commands, for those who would rather look than type.

    a form ── its fields (actions.py) ── the words of a command, shown next to its button ── a child process (jobs.py)
    a page ── what is in the folder (project_folder.py) ── what `runs`, `report` and `check` read ── HTML (pages.py)

Nothing is done here that a command does not do. Requests are let in by guard.py.
"""
