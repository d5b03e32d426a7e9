"""Studies: many arms over many recipes and seeds, from one file, in several processes, one line of results per run."""
