// Package machine tests one whole machine: a real `dsec up` with its daemons
// as processes, spoken to through the Go client, killed in its parts, and
// looked at for what it leaves.
package machine
