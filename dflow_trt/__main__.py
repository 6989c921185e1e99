"""`python -m dflow_trt`: the command line, for launchers that start a module."""

from dflow_trt.cli import main

if __name__ == "__main__":
    main()
