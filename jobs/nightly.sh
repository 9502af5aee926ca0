#!/bin/bash
# Submits tonight's job and its merge to SLURM. From cron:
#   0 1 * * *  cd /path/to/project && jobs/nightly.sh JOB.toml INPUT_DIRECTORY RESULTS_DIRECTORY
# A night that did not finish is simply submitted again with the same date: jobs/nightly.sh ... 2026-01-31
set -euo pipefail
JOB=${1:?usage: jobs/nightly.sh JOB.toml INPUT_DIRECTORY RESULTS_DIRECTORY [DATE]}
INPUT=${2:?no INPUT_DIRECTORY given}
RESULTS=${3:?no RESULTS_DIRECTORY given}
DATE=${4:-$(date +%F)}
OUTPUT=$RESULTS/$DATE.out
mkdir -p "$RESULTS"

# Before any node is asked for: is the input readable, are the columns there, do the prompts fit?
# It also fetches the model into the cache that the tasks then use offline.
batchjob validate "$JOB" --input "$INPUT/$DATE" --output "$OUTPUT"

# Add --partition, --sbatch=--gpus=1 and the like for your site.
batchjob slurm "$JOB" --input "$INPUT/$DATE" --output "$OUTPUT" --array 16 --max-running 8 --time 04:00:00 \
  --merge "$RESULTS/$DATE.parquet" --directory "$RESULTS/$DATE.slurm" --submit
