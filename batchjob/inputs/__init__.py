"""Input files: finding them, planning chunks over them, reading rows. Needs pyarrow, never torch."""
