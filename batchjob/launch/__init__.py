"""Launchers, which start a job elsewhere: the scripts of SLURM arrays and the checks of a site."""
