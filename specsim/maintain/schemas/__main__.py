"""Write the JSON Schema of every --json output: `python -m specsim.maintain.schemas`."""

from specsim.maintain.schemas.kept import FOLDER, write

if __name__ == "__main__":
    for path in write(FOLDER):
        print(path)
