"""The files of a run: its folder, record, checkpoints, and what a checkpoint stores."""
