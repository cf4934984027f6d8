from rl_training.cli import main

main()
