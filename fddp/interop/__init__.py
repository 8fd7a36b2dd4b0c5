"""Other libraries whose arrays and trees fddp takes."""
