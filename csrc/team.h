// The threads of torch's OpenMP runtime, borrowed through the entry that its own calls use.
//
// They spin for some milliseconds after torch has used them, and a second pool would have no processor in that time. Borrowed
// are only those of GNU's runtime, and only where a fork is safe: its threads do not survive one, and a region in the child
// waits for them for ever. So
// - a process that was itself forked borrows nothing: torch may have used its threads before the fork;
// - a thread that is about to fork ends the team it has borrowed, so that torch's own regions work in the child, and starts
//   another one with its next call; the child borrows nothing.
#pragma once

namespace attn {

// torch is loaded: shall the calls from now on run on its threads, if they can? Says whether they do
bool borrow_team(bool wanted);
bool team_is_borrowed();

// runs body(data) on so many threads, one of them the calling one; fewer inside a parallel region
void run_on_team(void (*body)(void*), void* data, unsigned threads);

}  // namespace attn
