"""Training of a small convolutional network on scikit-learn's digits, on several ranks.

`train` has the loop and the program of each process, `report` the printed result.
"""
