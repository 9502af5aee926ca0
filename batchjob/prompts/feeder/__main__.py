from batchjob.prompts.feeder.child import main

main()
