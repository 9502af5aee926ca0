"""`python -m batchjob` is the `batchjob` command."""

from batchjob.cli import main

if __name__ == "__main__":
    main()
