from batchjob.prompts.feeder.child import main

if __name__ == "__main__":
    main()
