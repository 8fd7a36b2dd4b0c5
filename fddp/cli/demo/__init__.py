"""Trains a small convolutional network on scikit-learn's digits, on several ranks.

The loop is in `train`; `rank` is what each process runs, `report` what is printed of it.
"""
