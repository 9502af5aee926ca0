from batchjob.feeder.child import main

main()
