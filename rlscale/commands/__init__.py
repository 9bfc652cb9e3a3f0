"""What a user does around a run, one module per command of `rlscale`: ``add_arguments(parser)``, and ``run(args)`` that
returns the exit status and raises ValueError or OSError, whose one line is printed, for wrong input."""
