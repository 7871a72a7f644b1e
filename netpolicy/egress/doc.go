// Package egress looks at what a sandbox says when it connects to ports 80 and 443
// of an address that a name alone has opened. The router gives it these connections;
// it reads the name that the client asks for, and connects both ends only if a rule
// opens that name and the address was handed out for it. What says no name, hides
// it, or is neither TLS nor HTTP is refused. What is said in TLS after that it passes
// on unread; of HTTP every request is looked at, and written anew.
//
// A Server is a process of its own, with no privileges, in the router's network
// namespace. It is told by the agent (Client) what each sandbox may reach, and
// goes on with that when the agent is gone; one that was told nothing lets nothing
// pass. It counts what went where. docs/formats/egress.md has what they say to
// each other.
package egress
