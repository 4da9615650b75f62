"""`python -m lfm2`."""

from lfm2.cli import main

if __name__ == "__main__":
    main()
