//! Determines the shard of this process from the flag `--shard`, or from variables with which a
//! cluster scheduler numbers its tasks.
#![allow(clippy::disallowed_methods, reason = "the boundary: variables are read here")]

use crate::record::ShardOfWork;

/// Environment variables that set a shard without a scheduler: its index, starting at 1, and the
/// number of shards.
const OWN_SHARD_VARIABLES: [&str; 2] = ["KERNELGATE_SHARD_INDEX", "KERNELGATE_SHARD_COUNT"];

/// Parses the value of `--shard`: "2/4", or "auto" for the variables of a scheduler.
///
/// # Errors
/// The error quotes the invalid text or names the invalid variable.
pub fn parse_shard(text: &str) -> Result<ShardOfWork, String> {
    match text {
        "auto" => shard_from_scheduler_variables(&|name| std::env::var(name).ok()),
        _ => text.parse().map_err(|error: crate::record::shard::ShardParseError| error.to_string()),
    }
}

/// Looks up an environment variable of a process, or of a simulated one in tests.
type EnvironmentLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The shard according to the variables of the only scheduler that sets any.
fn shard_from_scheduler_variables(variable: EnvironmentLookup<'_>) -> Result<ShardOfWork, String> {
    let mut found: Vec<(&str, ShardOfWork)> = Vec::new();
    for (scheduler, shard) in [
        (OWN_SHARD_VARIABLES[0], shard_from_kernelgate_variables(variable)?),
        ("SLURM_ARRAY_TASK_ID or SLURM_PROCID", shard_from_slurm_variables(variable)?),
        ("CI_NODE_INDEX", shard_from_gitlab_variables(variable)?),
        ("JOB_COMPLETION_INDEX", shard_from_kubernetes_variables(variable)?),
    ] {
        found.extend(shard.map(|shard| (scheduler, shard)));
    }
    // Variables set by a person take precedence over variables of a scheduler.
    match found[..] {
        [(first, shard), ..] if first == OWN_SHARD_VARIABLES[0] => Ok(shard),
        [(_, shard)] => Ok(shard),
        [] => Err(format!(
            "auto: no scheduler numbers this process: set {} and {}, or run it as a task of Slurm, \
             GitLab (parallel) or an Indexed Job of Kubernetes",
            OWN_SHARD_VARIABLES[0], OWN_SHARD_VARIABLES[1]
        )),
        [(one, first), (other, second), ..] => Err(format!(
            "auto: {one} names shard {first} and {other} names shard {second}: set {} and {}",
            OWN_SHARD_VARIABLES[0], OWN_SHARD_VARIABLES[1]
        )),
    }
}

/// Parses the number in an environment variable; `None` if the variable is empty or unset.
fn number_in_environment_variable(
    variable: EnvironmentLookup<'_>,
    name: &str,
) -> Result<Option<u32>, String> {
    let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("auto: {name}=`{text}` is not a number from 0"))
}

/// Parses the number in an environment variable that must be set, because a related variable is
/// set.
fn required_number_in_environment_variable(
    variable: EnvironmentLookup<'_>,
    name: &str,
    by: &str,
) -> Result<u32, String> {
    number_in_environment_variable(variable, name)?
        .ok_or_else(|| format!("auto: {by} is set and {name} is not"))
}

fn shard_if_index_is_in_range(
    index: u32,
    count: u32,
    names: &str,
) -> Result<Option<ShardOfWork>, String> {
    let shard = ShardOfWork { index_from_one: index, shard_count: count };
    shard
        .check_shard_index_and_count()
        .map_err(|_| format!("auto: {names} make shard {shard}, which does not exist"))?;
    Ok(Some(shard))
}

fn shard_from_kernelgate_variables(
    variable: EnvironmentLookup<'_>,
) -> Result<Option<ShardOfWork>, String> {
    let [index, count] = OWN_SHARD_VARIABLES;
    let Some(found) = number_in_environment_variable(variable, index)? else { return Ok(None) };
    shard_if_index_is_in_range(
        found,
        required_number_in_environment_variable(variable, count, index)?,
        &format!("{index} and {count}"),
    )
}

fn shard_from_gitlab_variables(
    variable: EnvironmentLookup<'_>,
) -> Result<Option<ShardOfWork>, String> {
    // Without the keyword `parallel`, GitLab sets only the total number of jobs, so there is no
    // shard.
    let Some(index) = number_in_environment_variable(variable, "CI_NODE_INDEX")? else {
        return Ok(None);
    };
    let count =
        required_number_in_environment_variable(variable, "CI_NODE_TOTAL", "CI_NODE_INDEX")?;
    shard_if_index_is_in_range(index, count, "CI_NODE_INDEX and CI_NODE_TOTAL")
}

/// Kubernetes counts job completions from 0, and provides no variable with their number.
fn shard_from_kubernetes_variables(
    variable: EnvironmentLookup<'_>,
) -> Result<Option<ShardOfWork>, String> {
    let Some(index) = number_in_environment_variable(variable, "JOB_COMPLETION_INDEX")? else {
        return Ok(None);
    };
    let count = required_number_in_environment_variable(
        variable,
        OWN_SHARD_VARIABLES[1],
        "JOB_COMPLETION_INDEX",
    )?;
    shard_if_index_is_in_range(
        index.saturating_add(1),
        count,
        &format!("JOB_COMPLETION_INDEX and {}", OWN_SHARD_VARIABLES[1]),
    )
}

/// A shard may be a task of a Slurm job array, a task of one Slurm job, or a combination of both.
fn shard_from_slurm_variables(
    variable: EnvironmentLookup<'_>,
) -> Result<Option<ShardOfWork>, String> {
    let array = match number_in_environment_variable(variable, "SLURM_ARRAY_TASK_ID")? {
        None => (0, 1),
        Some(id) => {
            let name = |part: &str| format!("SLURM_ARRAY_TASK_{part}");
            let get = |part: &str| {
                required_number_in_environment_variable(
                    variable,
                    &name(part),
                    "SLURM_ARRAY_TASK_ID",
                )
            };
            let (count, least, most) = (get("COUNT")?, get("MIN")?, get("MAX")?);
            let step = number_in_environment_variable(variable, &name("STEP"))?.unwrap_or(1).max(1);
            let whole = most.checked_sub(least).is_some_and(|range| range / step + 1 == count);
            if !whole || !(least..=most).contains(&id) {
                return Err(format!(
                    "auto: the array {least}-{most} has {count} tasks, so that a task's number \
                     does not say which part of the whole it is: name the shard, for example \
                     --shard $SLURM_ARRAY_TASK_ID/8"
                ));
            }
            ((id - least) / step, count)
        }
    };
    let task = match number_in_environment_variable(variable, "SLURM_PROCID")? {
        None => (0, 1),
        Some(id) => (id, number_in_environment_variable(variable, "SLURM_NTASKS")?.unwrap_or(1)),
    };
    if array.1 == 1
        && task.1 == 1
        && number_in_environment_variable(variable, "SLURM_ARRAY_TASK_ID")?.is_none()
    {
        return Ok(None);
    }
    let (index, count) = (array.0.saturating_mul(task.1) + task.0, array.1.saturating_mul(task.1));
    shard_if_index_is_in_range(
        index.saturating_add(1),
        count,
        "SLURM_ARRAY_TASK_ID and SLURM_PROCID",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard_from_test_variables(variables: &str) -> Result<String, String> {
        let lookup = |name: &str| {
            let each = variables.split_whitespace().filter_map(|it| it.split_once('='));
            each.filter(|(key, _)| *key == name).map(|(_, value)| value.to_owned()).next()
        };
        shard_from_scheduler_variables(&lookup).map(|shard| shard.to_string())
    }

    #[test]
    fn each_scheduler_determines_the_shard() {
        let array = "SLURM_ARRAY_TASK_COUNT=4 SLURM_ARRAY_TASK_MIN=10 SLURM_ARRAY_TASK_MAX=16 \
                     SLURM_ARRAY_TASK_STEP=2";
        for (variables, shard) in [
            ("KERNELGATE_SHARD_INDEX=2 KERNELGATE_SHARD_COUNT=3".to_owned(), "2/3"),
            ("CI_NODE_INDEX=4 CI_NODE_TOTAL=4".to_owned(), "4/4"),
            ("JOB_COMPLETION_INDEX=0 KERNELGATE_SHARD_COUNT=5".to_owned(), "1/5"),
            (format!("{array} SLURM_ARRAY_TASK_ID=12"), "2/4"),
            (format!("{array} SLURM_ARRAY_TASK_ID=10 SLURM_PROCID=0"), "1/4"),
            ("SLURM_PROCID=3 SLURM_NTASKS=8".to_owned(), "4/8"),
            (format!("{array} SLURM_ARRAY_TASK_ID=12 SLURM_PROCID=1 SLURM_NTASKS=2"), "4/8"),
            // Test case: a GitLab runner within a Slurm job.
            ("SLURM_PROCID=0 SLURM_NTASKS=1 CI_NODE_INDEX=1 CI_NODE_TOTAL=2".to_owned(), "1/2"),
        ] {
            assert_eq!(shard_from_test_variables(&variables), Ok(shard.to_owned()), "{variables}");
        }
    }

    #[test]
    fn invalid_scheduler_variables_are_named_in_the_error() {
        let gap = "SLURM_ARRAY_TASK_ID=5 SLURM_ARRAY_TASK_COUNT=2 SLURM_ARRAY_TASK_MIN=3 \
                   SLURM_ARRAY_TASK_MAX=5";
        for (variables, why) in [
            (
                "",
                "auto: no scheduler numbers this process: set KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT, or run it as a task of Slurm, GitLab (parallel) or an Indexed Job of Kubernetes",
            ),
            (
                "CI_NODE_TOTAL=1",
                "auto: no scheduler numbers this process: set KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT, or run it as a task of Slurm, GitLab (parallel) or an Indexed Job of Kubernetes",
            ),
            (
                "CI_NODE_INDEX=5 CI_NODE_TOTAL=4",
                "auto: CI_NODE_INDEX and CI_NODE_TOTAL make shard 5/4, which does not exist",
            ),
            ("CI_NODE_INDEX=1", "auto: CI_NODE_INDEX is set and CI_NODE_TOTAL is not"),
            ("CI_NODE_INDEX=x CI_NODE_TOTAL=4", "auto: CI_NODE_INDEX=`x` is not a number from 0"),
            (
                "JOB_COMPLETION_INDEX=0",
                "auto: JOB_COMPLETION_INDEX is set and KERNELGATE_SHARD_COUNT is not",
            ),
            (
                "JOB_COMPLETION_INDEX=4 KERNELGATE_SHARD_COUNT=4",
                "auto: JOB_COMPLETION_INDEX and KERNELGATE_SHARD_COUNT make shard 5/4, which does not exist",
            ),
            (
                "KERNELGATE_SHARD_INDEX=0 KERNELGATE_SHARD_COUNT=4",
                "auto: KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT make shard 0/4, which does not exist",
            ),
            (
                gap,
                "auto: the array 3-5 has 2 tasks, so that a task's number does not say which part of the whole it is: name the shard, for example --shard $SLURM_ARRAY_TASK_ID/8",
            ),
            (
                "CI_NODE_INDEX=1 CI_NODE_TOTAL=2 SLURM_PROCID=1 SLURM_NTASKS=2",
                "auto: SLURM_ARRAY_TASK_ID or SLURM_PROCID names shard 2/2 and CI_NODE_INDEX names shard 1/2: set KERNELGATE_SHARD_INDEX and KERNELGATE_SHARD_COUNT",
            ),
        ] {
            let error = shard_from_test_variables(variables).unwrap_err();
            assert_eq!(error, why, "{variables}");
        }
    }
}
