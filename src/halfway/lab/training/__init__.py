"""One training in one run folder. Begin with `loop`; `session` is a process, `run_folder` what it leaves."""
