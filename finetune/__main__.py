from finetune.desk.cli import main

main()
