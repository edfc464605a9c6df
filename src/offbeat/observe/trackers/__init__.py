"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio behind one Protocol.

Each tracker that is used lives in a process of its own: what a tracker imports, prints, asks for
or waits for stays there, and one that hangs can be ended.
"""
