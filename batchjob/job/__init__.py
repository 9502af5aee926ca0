"""One worker's run of a job: settings, chunks, rows, results. Needs no torch until the engine is created."""
