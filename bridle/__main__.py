"""`python -m bridle` is the `bridle` command."""

from bridle.cli import main

if __name__ == "__main__":
    main()
