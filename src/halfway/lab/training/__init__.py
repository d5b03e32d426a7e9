"""One training in one run folder. Begin with `loop`; `session` is one process's part, `run_folder` what it writes."""
