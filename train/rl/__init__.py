"""Reinforcement learning: the objective, rollouts, rewards and the learner."""
