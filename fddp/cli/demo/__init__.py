"""Training of a small convolutional network on scikit-learn's digits, on several ranks.

`train` has the loop, `rank` the program of each process, and `report` the printed result.
"""
