// Groups that backends use, to be left before the interpreter ends.
//
// Works that complete later would call Python, and release tensors that Python knows, on threads of
// the group, which an interpreter that has ended unwinds: SIGABRT instead of the process's own exit
// code.

#pragma once

#include "shm/messages.h"
#include "shm/shm_group.h"

#include <memory>

namespace fddp {

void remember_open_group(
    const std::shared_ptr<shm::ShmGroup>& group, const std::shared_ptr<shm::Messages>& messages);

// Leave all groups; their pending operations fail. Called without the GIL.
void leave_open_groups();

}  // namespace fddp
