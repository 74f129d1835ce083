"""`legato ray`: replicas that Ray places, starts and stops, behind our balancer. Ray is imported when it runs."""
