from finetune.cli import run_process

run_process()
