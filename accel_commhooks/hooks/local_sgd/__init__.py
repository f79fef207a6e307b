"""Local SGD: replicas that step on their own and are averaged now and then."""
